"""The HTTP APIs: endpoints, and the parts that they share."""
