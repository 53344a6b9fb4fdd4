"""From model files to programs: the configuration, the weights, and the step function of the model's family."""
