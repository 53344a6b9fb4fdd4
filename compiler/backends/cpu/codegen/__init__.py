"""From scheduled loop nests to LLVM IR, and from that to one linked object."""
