"""Model files to programs: configuration, weights, and the step of the model's family."""
