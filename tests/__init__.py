"""All tests, a folder for each kind; the modules here check the source tree itself."""
