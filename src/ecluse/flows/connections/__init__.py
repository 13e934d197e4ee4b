"""Connections to vendors: records of a tenant, the clients made from them, and the lane of each credential. The
settings of the environment are the connections of the tenant `default` only."""
