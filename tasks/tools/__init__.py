"""What every environment is built on: the protocol, the tool layer, retries, faults, the tool cache."""
