"""The pages that `server/api/pages.py` serves."""
