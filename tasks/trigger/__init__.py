"""How what asks for a refresh and the refresh itself find each other: by the state beside the query log."""
