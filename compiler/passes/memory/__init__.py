"""Memory passes: copy operands that an in-place call would destroy, make allocations explicit, expose the workspace of kernels, and place
allocations in an arena."""
