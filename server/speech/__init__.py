"""Transcribe speech with a model that hears windows of audio."""
