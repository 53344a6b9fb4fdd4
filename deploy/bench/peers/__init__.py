"""Other engines that `relaxserve bench model` compares with."""
