"""The families of models. Each file reads the configuration of one family, builds or imports the family's layer, and names its weights."""
