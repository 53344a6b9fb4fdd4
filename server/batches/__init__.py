"""Keep and run batches: files of requests that get only what other requests leave free."""
