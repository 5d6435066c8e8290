"""The fields of a config by subject: agents, tools, pictures, filters, servers and others. `OnlineConfig` inherits all of them."""
