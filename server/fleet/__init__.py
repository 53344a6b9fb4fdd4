"""Tell routers of a fleet how the prefix caches of the models change."""
