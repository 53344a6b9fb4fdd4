"""A worker of NVIDIA Dynamo: `relaxserve dynamo MODEL`. Only this package imports Dynamo, and only the command imports this package."""
