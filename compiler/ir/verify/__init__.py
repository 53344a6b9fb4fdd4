"""The verifier: the rules that every program keeps."""
