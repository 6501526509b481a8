"""HTTP routes. A route parses a request, calls one room of the server and shapes the answer; it holds no logic."""
