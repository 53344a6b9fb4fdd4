"""Read model files and build programs: read the configuration and the weights, and build the step of the model's family."""
