"""A fleet on Ray Serve: `serve run deploy.ray.app:app`. Only this package imports ray; the simulator of fleets imports its policies."""
