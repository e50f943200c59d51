"""The monitor without a screen: events and scrapes of gateways and vLLM servers, reduced to one frozen snapshot.

`snapshot` holds what is shown, `options` what was asked for. Neither a terminal library nor an engine is imported here.
"""
