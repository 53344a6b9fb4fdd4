"""The parts that families compose their layers from."""
