"""What the platform and the device agree on.

Parties: CI submits, the *builder* compiles and signs, the *server* stores and assigns, the
*device* verifies and runs.

    offline root -(sign)-> targets -(delegate)-> bins -(sign)-> release manifest -(sha256)->
    sections
    director root -(sign)-> director -(sign)-> assignment of one device -(sha256)-> the same
    release manifest

Only the standard library and `cryptography` may be imported here, so that a device carries nothing
else. Byte vectors under
`tests/contract` are kept for ever: what they hold is a promise to devices in the field.
"""
