"""Read a model's configuration and weights from its files, and build the programs that compute the model."""
