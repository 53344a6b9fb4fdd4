"""Other engines that `relaxserve bench model --peer` measures."""
