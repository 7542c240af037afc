"""A run from configuration to saved model: build, check, train, save, resume, serve."""
