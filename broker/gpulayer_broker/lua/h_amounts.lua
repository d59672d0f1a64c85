-- Shared: what a signature asks for. Its name is `<letter><gpus>.<vram>.<cpus>.<memory>.<disk>.<hash>` (MiB), so amounts
-- are read without a look-up. Letter: c = CPU, g = GPU of the kinds that matching allowed, a = a GPU if free, else CPU.

function H.amounts(sig)
  local a, g, v, c, m, d = string.match(sig, '^(%a)(%d+)%.(%d+)%.(%d+)%.(%d+)%.(%d+)%.')
  if not a then return nil end
  return {letter = a, gpus = tonumber(g), vram = tonumber(v), cpus = tonumber(c), memory = tonumber(m), disk = tonumber(d)}
end

-- lots of distinct devices, of an allowed group, with enough free memory; nil where there are too few
function H.pick_lots(lots, need, groups)
  local out, seen = {}, {}
  if need.gpus == 0 then return out end
  local allowed = ',' .. groups .. ','
  for _, lot in ipairs(lots) do
    if not seen[lot.uuid] and lot.free >= need.vram and string.find(allowed, ',' .. lot.group .. ',', 1, true) then
      seen[lot.uuid] = true
      out[#out + 1] = lot
      if #out == need.gpus then return out end
    end
  end
  if need.letter == 'a' then return {} end
  return nil
end

-- does `need` fit into `room` ({cpus, memory, disk, lots})? returns the lots to take
function H.fit(room, need, groups)
  if need.cpus > room.cpus or need.memory > room.memory or need.disk > room.disk then return nil end
  return H.pick_lots(room.lots, need, groups)
end
