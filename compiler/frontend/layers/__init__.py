"""The parts from which families compose their layers."""
