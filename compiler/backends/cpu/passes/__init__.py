"""The passes that only this back end runs."""
