"""How kernels run on a GPU: the blocks and threads of a loop nest."""
