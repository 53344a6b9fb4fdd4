"""A fleet on Ray Serve: `serve run deploy.ray.app:app`. Only this package imports ray, and nothing else imports this package."""
