"""Start and reach the server of a replica, for the engines on which fleets run: Ray Serve and Dynamo."""
