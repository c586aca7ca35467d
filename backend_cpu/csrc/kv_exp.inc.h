// e^v to about one unit in the last place; the argument is held where 2^n stays a float. Included
// inside an anonymous namespace, after simd_*.h.
HAL_INLINE VF vexp(VF v) {
  v = vmin(vset(89.0f), vmax(vset(-104.0f), v));
  const VF n = vround(vmul(v, vset(1.44269504f)));
  VF r = vfma(n, vset(-0.693359375f), v);
  r = vfma(n, vset(2.12194440e-4f), r);
  VF p = vset(1.0f / 5040);
  p = vfma(p, r, vset(1.0f / 720));
  p = vfma(p, r, vset(1.0f / 120));
  p = vfma(p, r, vset(1.0f / 24));
  p = vfma(p, r, vset(1.0f / 6));
  p = vfma(p, r, vset(0.5f));
  p = vfma(p, r, vset(1.0f));
  p = vfma(p, r, vset(1.0f));
  return vmul(p, vpow2(n));
}
