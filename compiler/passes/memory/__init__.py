"""Memory passes: explicit allocations, workspace, and the plan of the arena."""
