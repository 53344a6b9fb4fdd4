"""Idioms: the shapes by which passes and schedules recognise loop nests (products, rows, spatial nests)."""
