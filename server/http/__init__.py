"""The HTTP server below the APIs: connections, limits, keys, request ids."""
