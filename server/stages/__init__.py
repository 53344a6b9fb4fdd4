"""The connections between the stages of a model: processes that compute its layers one after the other."""
