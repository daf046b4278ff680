"""Pure part of a dashboard: `picture` draws it."""
