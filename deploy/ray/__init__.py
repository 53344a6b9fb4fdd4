"""A fleet on Ray Serve: `serve run deploy.ray.app:app`. Only this package imports ray. The simulator of fleets (deploy/bench/fleet) imports
this package's modules that decide about routing and scaling, which do without ray."""
