"""What a server tells routers of a fleet: how the prefix caches of its models change."""
