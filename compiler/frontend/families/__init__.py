"""The families of models. Each file states the fields of a family's configuration, its layer, and the names of its weights."""
