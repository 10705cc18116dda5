"""Loss functions as traced graphs: recorded on the client, checked and run within limits on the server."""
