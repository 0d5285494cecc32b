"""Time to a target over slow links: what compressing gains."""
