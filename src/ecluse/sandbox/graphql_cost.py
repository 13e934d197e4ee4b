"""GraphQL documents of the simulated shop: parsed and checked once each, and their cost by Shopify's rules (a scalar is
free, an object costs one point, a connection as many as its page may have, a mutation ten)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from graphql import (
    DocumentNode,
    FieldNode,
    GraphQLError,
    GraphQLSchema,
    InlineFragmentNode,
    OperationDefinitionNode,
    OperationType,
    SelectionSetNode,
    VariableValues,
    get_argument_values,
    get_named_type,
    get_nullable_type,
    get_variable_values,
    is_list_type,
    parse,
    validate,
)

MUTATION = 10


class Document(NamedTuple):
    """A checked document: its one operation, or the errors for which it is refused."""

    parsed: DocumentNode | None
    operation: OperationDefinitionNode | None
    errors: list[dict[str, Any]]


@lru_cache(100)
def document(schema: GraphQLSchema, text: str) -> Document:
    """Parse a document and validate it against the schema. The result has errors if it is invalid, or has not exactly
    one operation."""
    try:
        parsed = parse(text)
    except GraphQLError as error:
        return Document(None, None, [dict(error.formatted)])
    errors = validate(schema, parsed)
    operations = [one for one in parsed.definitions if isinstance(one, OperationDefinitionNode)]
    if not errors and len(operations) != 1:
        errors = [GraphQLError("A request has one operation.")]
    return Document(parsed, operations[0] if operations else None, [dict(error.formatted) for error in errors])


def requested_cost(schema: GraphQLSchema, operation: OperationDefinitionNode, variables: Mapping[str, Any]) -> int:
    """Return the most points that the operation may cost. Raise GraphQLError if a variable is missing or bad."""
    given = get_variable_values(schema, operation.variable_definitions or (), dict(variables))
    if isinstance(given, list):
        raise given[0]
    if operation.operation is OperationType.MUTATION or schema.query_type is None:
        return MUTATION
    return _cost(schema, schema.query_type, operation.selection_set, given)


def actual_cost(operation: OperationDefinitionNode, data: Mapping[str, Any]) -> int:
    """Return the points that an answer costs: one per object in its data, or the flat price of a mutation."""
    return MUTATION if operation.operation is OperationType.MUTATION else _objects(data) - 1


def _objects(value: Any) -> int:
    if isinstance(value, Mapping):
        return 1 + sum(_objects(one) for one in value.values())
    return sum(_objects(one) for one in value) if isinstance(value, list) else 0


def _cost(schema: GraphQLSchema, kind: Any, selected: SelectionSetNode, given: VariableValues, page: int = 1) -> int:
    """Return the cost of a selection in an object of this kind; `page`: the size of the lists in it, if the object is a
    connection."""
    total = 0
    for node in selected.selections:
        if isinstance(node, InlineFragmentNode):
            narrowed = schema.get_type(node.type_condition.name.value) if node.type_condition is not None else kind
            total += _cost(schema, narrowed or kind, node.selection_set, given, page)
        elif isinstance(node, FieldNode) and node.selection_set is not None:
            field = kind.fields[node.name.value]
            arguments = get_argument_values(field, node, given)
            inner = _cost(schema, get_named_type(field.type), node.selection_set, given, arguments.get("first", 1))
            listed = page if is_list_type(get_nullable_type(field.type)) else 1
            total += (len(arguments["ids"]) if "ids" in arguments else listed) * (1 + inner)
    return total
