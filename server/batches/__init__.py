"""Store and run batches: files of requests, which use only the capacity that other requests leave free."""
