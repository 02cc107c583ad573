"""The parts of the reference engine: arguments, model thread, requests, counters, HTTP."""
