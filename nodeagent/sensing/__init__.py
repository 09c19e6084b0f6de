"""The building blocks of the sensors: protocol, periods, small files, agent time, an operator's clear."""
