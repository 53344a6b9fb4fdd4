"""The Grafana dashboard and the script that generates it."""
