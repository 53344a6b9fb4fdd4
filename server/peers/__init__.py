"""The exchange of prefix cache pages between the servers of a fleet."""
