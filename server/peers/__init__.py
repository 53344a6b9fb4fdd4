"""Servers of a fleet that give each other pages of their prefix caches."""
