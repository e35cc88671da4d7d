"""How what asks for a refresh and the refresh itself find each other: by the states in the query log's database."""
