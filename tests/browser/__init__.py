"""The page in a real browser: needs the system's Chromium and the extra ``browser``."""
