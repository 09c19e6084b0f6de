"""What every sensor is built from: the protocol, periods, small files, agent time, an operator's clear."""
