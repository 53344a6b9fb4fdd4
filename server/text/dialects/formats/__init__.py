"""Definitions of the formats: the table of formats with markers around calls and thoughts, and harmony, the format of gpt-oss."""
