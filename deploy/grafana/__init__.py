"""The Grafana dashboard, and the script that writes it."""
