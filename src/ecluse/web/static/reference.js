/* The interactive reference at /docs: Swagger UI over this server's own document. No validator: nothing is requested
   from elsewhere. */
SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#reference",
  deepLinking: true,
  docExpansion: "none",
  defaultModelsExpandDepth: -1,
  validatorUrl: null,
});
